"""What our files know of a weight and other formats do not, carried along in ``__metadata__``.

The source's dtype, how it was pruned, the size of a block: other tools pass over the key, and a
file that comes back becomes the one that it was.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Mapping
from functools import lru_cache

from sp24cli.checkpoint.header import label, load_object
from sp24cli.checkpoint.reader import SafetensorsFile
from sp24cli.errors import BadInputError
from sp24cli.packed import PackInfo

ORIGIN_KEY = "sp24.origin"


def origin_metadata(infos: Mapping[str, PackInfo]) -> dict[str, str]:
    """The entry of ``__metadata__`` that `origins` reads."""
    described = {name: info.to_json() for name, info in infos.items()}
    return {ORIGIN_KEY: json.dumps(described, sort_keys=True, separators=(",", ":"))}


def origins(file: SafetensorsFile) -> Mapping[str, PackInfo]:
    """What ``file`` says of the weights that sp24 once packed; empty where it says nothing.

    Raises:
        BadInputError: it says what cannot be.
    """
    said = ((part, part.metadata.get(ORIGIN_KEY)) for part in file.parts())
    return ChainMap(
        *(
            _read(text, f"{label(part.path)}: {ORIGIN_KEY}")
            for part, text in said
            if text is not None
        )
    )


# As many as a checkpoint has shards: its weights are asked for one by one.
@lru_cache(maxsize=256)
def _read(text: str, where: str) -> dict[str, PackInfo]:
    try:
        return {name: PackInfo.from_json(info) for name, info in load_object(text, where).items()}
    except BadInputError as error:
        raise BadInputError(f"{where}: {error}") from error
