"""What a schedule is: the value, its text, its rules, its dependencies, its lowering."""

from pipeloom.schedule.action import Action, Kind
from pipeloom.schedule.balance import balance
from pipeloom.schedule.lower import lower
from pipeloom.schedule.lower_sharding import add_data_parallel, add_reduce_grad, add_unshard
from pipeloom.schedule.lower_stage_swaps import add_stage_swaps, add_updates, place_of_updates
from pipeloom.schedule.lower_tied import add_tied
from pipeloom.schedule.offload import offload
from pipeloom.schedule.placement import PLACEMENTS, Placement
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule
from pipeloom.schedule.slices import add_slices, sliced
from pipeloom.schedule.split import split_backward
from pipeloom.schedule.text import format_schedule, format_torch_csv, parse_schedule, parse_torch_csv

__all__ = [
    "PLACEMENTS",
    "Action",
    "Kind",
    "Level",
    "Placement",
    "Row",
    "Schedule",
    "add_data_parallel",
    "add_reduce_grad",
    "add_slices",
    "add_stage_swaps",
    "add_tied",
    "add_unshard",
    "add_updates",
    "balance",
    "format_schedule",
    "format_torch_csv",
    "lower",
    "offload",
    "parse_schedule",
    "parse_torch_csv",
    "place_of_updates",
    "sliced",
    "split_backward",
]
