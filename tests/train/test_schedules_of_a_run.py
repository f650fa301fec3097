"""The schedules of one run: training, evaluation and sampling find their stages on the same ranks."""

import pytest
from families import TRAINING, fitting
from small_run import small_run

from pipeloom.config import ScheduleConfig
from pipeloom.layout import Layout
from pipeloom.train.pipeline import forward_schedule, training_schedule


@pytest.mark.parametrize("family", TRAINING)
def test_evaluation_goes_through_the_stages_where_training_has_them(tmp_path, family):
    layout = Layout(pp=3, loops=fitting(family, 2)["loops"], num_microbatches=6)
    config = small_run(tmp_path, layout=layout, schedule=ScheduleConfig(family=family))
    assert forward_schedule(config, 2).placement == training_schedule(config).placement
