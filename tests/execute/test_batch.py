"""A step's loss is the mean over all valid tokens, however they are spread over micro-batches."""

import numpy as np
import torch
from torch.nn import functional

from pipeloom.execute.stages.batch import IGNORED, Batch


def test_inputs_and_targets_are_one_token_apart():
    windows = np.arange(4 * 6).reshape(4, 6)
    batch = Batch.of(windows, 2, torch.device("cpu"))
    assert [tuple(part.shape) for part in batch.inputs] == [(2, 5), (2, 5)]
    assert torch.equal(batch.inputs[1] + 1, batch.targets[1])
    assert batch.num_valid == 20


def test_micro_batches_with_unequal_numbers_of_valid_tokens_are_weighed_by_token():
    torch.manual_seed(0)
    targets = [torch.tensor([[1, 2, IGNORED]]), torch.tensor([[0, IGNORED, IGNORED]])]
    batch = Batch([torch.zeros(1, 3, dtype=torch.int64)] * 2, targets, num_valid=3)
    logits = [torch.randn(1, 3, 4), torch.randn(1, 3, 4)]
    total = sum(batch.loss(part, number) for number, part in enumerate(logits))
    expected = functional.cross_entropy(torch.cat(logits).flatten(0, 1), torch.cat(targets).flatten())
    torch.testing.assert_close(total, expected)


def test_replicas_share_out_a_step_and_all_divide_by_the_valid_tokens_of_all():
    windows = np.arange(8 * 6).reshape(8, 6)
    windows[0, 2:] = IGNORED  # the first replica has fewer
    parts = [Batch.of(windows, 2, torch.device("cpu"), replica=replica, num_replicas=2) for replica in range(2)]
    whole = Batch.of(windows, 4, torch.device("cpu"))
    assert all(torch.equal(*pair) for pair in zip(parts[0].inputs + parts[1].inputs, whole.inputs, strict=True))
    assert all(torch.equal(*pair) for pair in zip(parts[0].targets + parts[1].targets, whole.targets, strict=True))
    assert parts[0].num_valid == parts[1].num_valid == whole.num_valid == 40 - 4
