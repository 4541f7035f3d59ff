"""Text in, batches out: sources -> tokenizer -> memory-mapped shards + manifest -> deterministic batches."""

from ffnlab.data.dataset import Dataset, open_dataset
from ffnlab.data.encoders import Tokenizer, load_tokenizer

__all__ = ["Dataset", "Tokenizer", "load_tokenizer", "open_dataset"]
