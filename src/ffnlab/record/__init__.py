"""The record of a run: its directory (the truth) and the sinks that get a copy.

`rundir` the folder, its lock and its config; `metrics` one JSON object a line; `checkpoint` model and trainer
state; `neurons` per-neuron arrays over steps; `sinks`, `console`, `wandb`, `tensorboard` the copies.
"""
