"""The data room: rows read and checked, kept apart, mixed, put in order, and packed.

Knows no tokenizer and no algorithm. A bad row is refused by file, line and field; every column that no kind of row
asks for is kept and handed to the reward function as it is.

    rows.py, making.py, fields.py         the kinds of row, and what makes them
    sources.py, reading.py, adapters.py   JSON Lines, JSON, Parquet, Hugging Face, rows of other systems
    splits.py, order.py, mixing.py        held-out prompts, shuffled batches, several sets as one
    packing.py                            several rows in one, for a trainer of your own
"""

from rl_algorithms.data.adapters import VERL_COLUMNS, from_nemo_gym
from rl_algorithms.data.making import make_row
from rl_algorithms.data.mixing import Mixed, Mixture
from rl_algorithms.data.order import ShuffledBatches, batches
from rl_algorithms.data.packing import PackedRows, lay_out, pack
from rl_algorithms.data.reading import Adapter, SkippedRows, read_jsonl, read_rows, stream_rows
from rl_algorithms.data.rows import ConversationRow, DataError, LabelledRow, PreferenceRow, Row, unpaired
from rl_algorithms.data.sources import Source
from rl_algorithms.data.splits import Dataset, split_held_out

__all__ = [
    "VERL_COLUMNS",
    "Adapter",
    "ConversationRow",
    "DataError",
    "Dataset",
    "LabelledRow",
    "Mixed",
    "Mixture",
    "PackedRows",
    "PreferenceRow",
    "Row",
    "ShuffledBatches",
    "SkippedRows",
    "Source",
    "batches",
    "from_nemo_gym",
    "lay_out",
    "make_row",
    "pack",
    "read_jsonl",
    "read_rows",
    "split_held_out",
    "stream_rows",
    "unpaired",
]
