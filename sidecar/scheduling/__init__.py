"""The admission rules, without I/O, clock or event loop."""

from sidecar.scheduling.scheduler import Scheduler
from sidecar.scheduling.ticket import Admission, Rule, Ticket, Wait

__all__ = ["Admission", "Rule", "Scheduler", "Ticket", "Wait"]
