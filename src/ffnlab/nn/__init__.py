"""The network: every part of a Transformer block, built from the options of a yaml."""
