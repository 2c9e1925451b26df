"""The ways to run the forward pass of a step; the runner takes the first that takes the batch."""
