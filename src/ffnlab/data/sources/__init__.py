"""Where text or tokens come from; one file per kind."""
