"""The control plane of a server in one process, on virtual time, with faults (docs/simulation.md).

The frontend, its client of the engines, their lines and links, the supervision of the engines and
each engine's loop, scheduler and cache are the product's own. Processes, sockets, the model and time
are simulated. All chance comes from one seed."""
