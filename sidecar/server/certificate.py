"""The certificate of the clients' port. Its files are looked at now and then, as a policy's are: they are renewed."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import NoReturn

from sidecar.policy.followed_files import stamp

LOOK_EVERY_S = 1.0

_log = logging.getLogger("sidecar.serve")


class Certificate:
    """The certificate in `file`, with those of its issuers, and its private key in `key_file`, or else in `file`, too.

    `context` is for the next connection. Raises ValueError where the files cannot be used.
    """

    def __init__(self, file: str, key_file: str | None) -> None:
        self._names = (file, key_file or file)
        self._known = self._stamps()
        self._broken: object = None
        self.context = _context(*self._names)

    async def follow(self) -> None:
        """Looks for ever. The disk is read in a thread, so that a disk that hangs holds up no request."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Takes the files' content where they have changed.

        What cannot be used may be half written: it is reported where the next look finds it so, and the certificate
        before stays in force.
        """
        stamps = self._stamps()
        if stamps == self._known:
            return
        try:
            self.context = _context(*self._names)
        except ValueError as mistake:
            if stamps != self._broken:
                self._broken = stamps
                return
            _log.error("%s; the certificate before stays in force", mistake, extra={"event": "certificate_rejected"})
        else:
            _log.info("the certificate in %s is in force", self._names[0], extra={"event": "certificate_reloaded"})
        self._known, self._broken = stamps, None

    def _stamps(self) -> object:
        return [stamp(name) for name in self._names]


def new_certificate(file: str | None, key_file: str | None) -> Certificate | None:
    """The certificate that the command line names; None where it names none. Raises ValueError."""
    if file is None:
        if key_file is not None:
            raise ValueError("--tls-key is given without --tls-cert; name the certificate's file, too")
        return None
    return Certificate(file, key_file)


def _context(file: str, key_file: str) -> ssl.SSLContext:
    _check_readable(file)
    _check_readable(key_file)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(file, key_file, password=_no_password)
    except OSError as error:  # ssl.SSLError is one
        why = getattr(error, "reason", None) or error
        message = (
            f"{file} and {key_file} are no certificate and its private key, in PEM, with the certificate first: {why}"
        )
        raise ValueError(message) from None
    return context


def _check_readable(file: str) -> None:
    try:
        with open(file, "rb"):
            pass
    except OSError as error:  # that of `load_cert_chain` names no file
        raise ValueError(f"{file} cannot be read: {error.strerror}; name a file in PEM") from None


def _no_password() -> NoReturn:
    raise ValueError("the private key of the certificate is encrypted; write it without a password: openssl pkey")
