"""Load a dump in its JSON form: from torch's HTTP handlers, or from NVIDIA's collector."""

from __future__ import annotations

from typing import BinaryIO

import msgspec

from fr_exporter.errors import MalformedDump, PartialDump, RejectedDump


def load(file: BinaryIO) -> object:
    """Return the plain data that an open JSON file holds.

    Raises:
        PartialDump: the text ends before it is complete.
        RejectedDump: it nests deeper than any dump, or asks for more memory than there is.
        MalformedDump: this is no JSON.
    """
    try:
        return msgspec.json.decode(file.read())
    except msgspec.DecodeError as error:
        if "truncated" in str(error):
            raise PartialDump("half-written: the JSON ends too early") from None
        raise MalformedDump(f"not a dump: {error}") from None
    except UnicodeDecodeError as error:
        raise MalformedDump(f"not a dump: {error}") from None
    except RecursionError:
        raise RejectedDump("refused: the JSON nests too deeply") from None
    except MemoryError:
        raise RejectedDump("refused: the JSON asks for more memory than the limit allows") from None
