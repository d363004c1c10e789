"""Pickles that hold plain data, and nothing else.

The only module that imports pickle. torch writes dicts, lists, tuples, strings, numbers, booleans and None; whatever
would look up a name, call something or set an object's state ends in `RejectedDump` before it happens.
"""

from __future__ import annotations

import pickle
from typing import BinaryIO, NoReturn

from fr_exporter.errors import MalformedDump, PartialDump, RejectedDump


class _PlainDataUnpickler(pickle.Unpickler):
    """An unpickler without names: every class, function, extension and persistent ID is refused.

    Without a callable on the stack the opcodes that call (REDUCE, OBJ, NEWOBJ, BUILD) find nothing to act on.
    """

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RejectedDump(f"refused: the file asks for {module}.{name}, a dump holds plain data only")

    def persistent_load(self, _: object) -> NoReturn:
        raise RejectedDump("refused: the file asks for a persistent object, a dump holds plain data only")


def dump(data: object) -> bytes:
    """Return plain data as a pickle of protocol 2, as torch writes it."""
    return pickle.dumps(data, protocol=2)


def load(file: BinaryIO) -> object:
    """Return the plain data that an open pickle file holds.

    Feed it the open file and not its bytes: the C unpickler then reads ahead by itself, twice as fast.

    Raises:
        PartialDump: the pickle ends before it is complete.
        RejectedDump: the pickle would run code or asks for more memory than there is.
        MalformedDump: this is no pickle.
    """
    try:
        return _PlainDataUnpickler(file).load()
    except RejectedDump:
        raise
    except EOFError:
        raise PartialDump("half-written: the pickle ends too early") from None
    except MemoryError:
        raise RejectedDump("refused: the pickle asks for more memory than the limit allows") from None
    except pickle.UnpicklingError as error:
        if "truncated" in str(error):
            raise PartialDump("half-written: the pickle ends too early") from None
        if "buffer" in str(error):
            raise RejectedDump("refused: the pickle asks for data outside of it") from None
        raise MalformedDump(f"not a dump: {error}") from None
    except (OSError, KeyboardInterrupt):
        raise
    except Exception as error:  # noqa: BLE001
        # What is left are opcodes that act on an object where only plain data lies: a call, a state, an index.
        raise RejectedDump(f"refused: the pickle is not plain data ({type(error).__name__}: {error})") from None
