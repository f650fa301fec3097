"""What a schedule is: the value, its text, its rules, its dependencies."""

from pipeloom.schedule.action import Action
from pipeloom.schedule.file import ScheduleFile
from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.placement import PLACEMENTS, Placement
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule
from pipeloom.schedule.text import format_schedule, parse_schedule, read_schedule

__all__ = [
    "PLACEMENTS",
    "Action",
    "Kind",
    "Level",
    "Placement",
    "Row",
    "Schedule",
    "ScheduleFile",
    "format_schedule",
    "parse_schedule",
    "read_schedule",
]
