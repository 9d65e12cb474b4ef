"""Simulation of a trace in virtual time: the product's own scheduler and pools before engines that are a step model."""
