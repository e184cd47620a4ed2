"""The data room: rows read and checked, kept apart, mixed, put in order, and packed.

A bad row is refused by file, line and field; every column that no kind of row asks for is kept and handed to the reward
function as it is.

    making.py, fields.py                  what makes rows; their kinds are in `rl_algorithms.rows`
    sources.py, reading.py, adapters.py   JSON Lines, JSON, Parquet, Hugging Face, rows of other systems
    datasets.py                           a data set in the form that training needs, some of its prompts held out
    order.py, mixing.py                   shuffled batches, several sets as one
    packing.py                            several rows in one, for a trainer of your own
"""

from rl_algorithms.data.adapters import VERL_COLUMNS, from_nemo_gym
from rl_algorithms.data.datasets import (
    ConversationData,
    Dataset,
    LabelledData,
    MixedSource,
    PreferenceData,
    held_out_demonstrations,
    load_dataset,
    split_held_out,
)
from rl_algorithms.data.making import make_row
from rl_algorithms.data.mixing import Mixed, Mixture
from rl_algorithms.data.order import ShuffledBatches, StreamedBatches, batches
from rl_algorithms.data.packing import PackedRows, lay_out, pack
from rl_algorithms.data.reading import Adapter, PromptTemplate, SkippedRows, read_jsonl, read_rows, stream_rows
from rl_algorithms.data.sources import Source
from rl_algorithms.rows import ConversationRow, DataError, LabelledRow, PreferenceRow, Row, unpaired

__all__ = [
    "VERL_COLUMNS",
    "Adapter",
    "ConversationData",
    "ConversationRow",
    "DataError",
    "Dataset",
    "LabelledData",
    "LabelledRow",
    "Mixed",
    "MixedSource",
    "Mixture",
    "PackedRows",
    "PreferenceData",
    "PreferenceRow",
    "PromptTemplate",
    "Row",
    "ShuffledBatches",
    "SkippedRows",
    "Source",
    "StreamedBatches",
    "batches",
    "from_nemo_gym",
    "held_out_demonstrations",
    "lay_out",
    "load_dataset",
    "make_row",
    "pack",
    "read_jsonl",
    "read_rows",
    "split_held_out",
    "stream_rows",
    "unpaired",
]
