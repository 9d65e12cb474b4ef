"""A DNS server of its own for a test: UDP and TCP, on loopback, in two threads. Its zone may change at any time."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from tests.support.ports import free_ports

ZONE = "fleet.test."
_SMALLEST = 512


class DnsServer:
    """`records` maps a name and a type to the records' texts. A name without any record does not exist.

    `rcode` answers every query with that error; `is_silent` answers none. `queries` counts those that came,
    `over_tcp` those of them that came over TCP.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.ttl_s = 30
        self.rcode: dns.rcode.Rcode | None = None
        self.is_silent = False
        self.queries = self.over_tcp = 0
        self.port = port or free_ports(1)
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind((host, self.port))
        self._tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._tcp.bind((host, self.port))
        self._tcp.listen(16)
        self._is_open = True
        for served in (self._serve_udp, self._serve_tcp):
            threading.Thread(target=served, daemon=True).start()

    def __enter__(self) -> DnsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        for listener in (self._udp, self._tcp):
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def set(self, name: str, kind: str, *texts: str) -> None:
        """The records of a name in the zone, of one type, from now on."""
        self.records[name + "." + ZONE, kind] = list(texts)

    def _response(self, wire: bytes) -> dns.message.Message | None:
        self.queries += 1
        if self.is_silent:
            return None
        query = dns.message.from_wire(wire)
        response = dns.message.make_response(query)
        response.flags |= dns.flags.AA | dns.flags.RA
        if self.rcode is not None:
            response.set_rcode(self.rcode)
            return response
        asked = query.question[0]
        name, kind = asked.name.to_text().lower(), dns.rdatatype.to_text(asked.rdtype)
        if not any(known == name for known, _ in list(self.records)):
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif texts := self.records.get((name, kind)):
            response.answer.append(_rrset(asked.name, self.ttl_s, kind, texts))
        return response

    def _serve_udp(self) -> None:
        while self._is_open:
            try:
                wire, sender = self._udp.recvfrom(4096)
            except OSError:
                return
            response = self._response(wire) if wire else None
            if response is not None:
                with suppress(OSError):
                    self._udp.sendto(_fitting(response), sender)

    def _serve_tcp(self) -> None:
        while self._is_open:
            try:
                connection, _ = self._tcp.accept()
            except OSError:
                return
            connection.settimeout(5)
            with connection, suppress(OSError):
                while size := int.from_bytes(connection.recv(2), "big"):
                    self.over_tcp += 1
                    response = self._response(connection.recv(size))
                    if response is not None:
                        wire = response.to_wire(max_size=65535)
                        connection.sendall(len(wire).to_bytes(2, "big") + wire)


def _rrset(name: dns.name.Name, ttl_s: int, kind: str, texts: list[str]) -> dns.rrset.RRset:
    """The texts as they are, also where one is there twice."""
    found = dns.rrset.RRset(name, dns.rdataclass.IN, dns.rdatatype.from_text(kind))
    found.update_ttl(ttl_s)
    found.items = dict.fromkeys(
        record for text in texts for record in dns.rrset.from_text(name, ttl_s, "IN", kind, text)
    )
    return found


def _fitting(response: dns.message.Message) -> bytes:
    """The response, or where it is too large for UDP an empty one that says so."""
    wire = response.to_wire(max_size=65535)
    if len(wire) <= _SMALLEST:
        return wire
    response.answer.clear()
    response.flags |= dns.flags.TC
    return response.to_wire()
