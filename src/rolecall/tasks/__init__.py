"""Tasks and rows: what is learnt from.

`rows` reads files, `kinds` says what rows are for, `builtin` has tasks with exact verifiers, `names` finds all of them.
Nothing here imports torch.
"""

from rolecall.tasks.builtin import Task, demonstrations, preference_rows
from rolecall.tasks.kinds import Kind, Record, kind_of, record, records
from rolecall.tasks.names import find_task, resolve
from rolecall.tasks.row_files import read_rows
from rolecall.tasks.rows import ListRows, RowError, Rows, split

__all__ = [
    "Kind",
    "ListRows",
    "Record",
    "RowError",
    "Rows",
    "Task",
    "demonstrations",
    "find_task",
    "kind_of",
    "preference_rows",
    "read_rows",
    "record",
    "records",
    "resolve",
    "split",
]
