"""Whether the files of a `Tls` can be used, and the SSL context that they give."""

from __future__ import annotations

import os
import ssl

import msgspec

from dlrover_hooks.config.settings import Tls
from dlrover_hooks.errors import UsageError


def context(tls: Tls) -> ssl.SSLContext:
    """The SSL context for `tls`. Raises OSError (which includes ssl.SSLError) if a file cannot be used."""
    folder = os.path.isdir(tls.ca)
    made = ssl.create_default_context(capath=tls.ca if folder else None, cafile=None if folder else tls.ca)
    if tls.cert:
        made.load_cert_chain(tls.cert, tls.key or None, password="")  # fails for an encrypted key instead of prompting
    return made


def usable(tls: Tls) -> Tls:
    """`tls` with the path of the default CA bundle filled in. Raises UsageError if a file cannot be used."""
    from requests.utils import DEFAULT_CA_BUNDLE_PATH  # importing the settings must not import requests

    tls = msgspec.structs.replace(tls, ca=tls.ca or DEFAULT_CA_BUNDLE_PATH)
    try:
        context(tls)
    except OSError as error:
        raise UsageError(
            f"The files for TLS cannot be used (CA {tls.ca}, certificate {tls.cert or 'none'}, "
            f"key {tls.key or 'none'}): {error}.",
            hint="Set DLROVER_HOOKS_CA_FILE, DLROVER_HOOKS_CLIENT_CERT and DLROVER_HOOKS_CLIENT_KEY to PEM files, the "
            "key without a passphrase.",
        ) from None
    return tls
