"""Leases from Python: code that calls the engine itself takes its turn in the pool of the HTTP requests."""

from sidecar.leases.admission import Admission
from sidecar.leases.held_lease import HeldLease, LeasePreempted
from sidecar.leases.threads import ThreadAdmission

__all__ = ["Admission", "HeldLease", "LeasePreempted", "ThreadAdmission"]
