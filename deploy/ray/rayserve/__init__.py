"""Setpoint as an application of Ray Serve: an ingress, and replicas with one engine each."""
