"""Tables, figures and reports out of run directories: reads them, never a model, and writes nothing into the
record."""
