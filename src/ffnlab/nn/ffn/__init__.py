"""Feed-forward variants, one file each: sub-modules `up`, `act`, `down` (and `gate`) are the contract."""
