"""Activations, one file per family. A part is `Cls(*, d_ff, **options)` and maps (..., F) to (..., F)."""
