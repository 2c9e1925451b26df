"""From a StepPlan to sampled ids: permanent slots, the KV pool, batches, and the runner that drives
the model."""
