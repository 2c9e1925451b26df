"""The data plane: tensors, layers, kernels, sampling. Works on plans of :mod:`setpoint.core`; knows
no queue, HTTP or text."""
