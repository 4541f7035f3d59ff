"""Models as others save them: names and shapes of the weights there and here, and what each format can say.

Pure functions: a state dict to a state dict, a description (config.json) to overrides and back. Nothing here
builds a model or touches a run. On the way in and out `head.weight` is left out where it is the embedding.
"""
