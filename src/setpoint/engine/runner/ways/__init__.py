"""The ways to run the forward pass of a step; the runner uses the first that takes the batch."""
