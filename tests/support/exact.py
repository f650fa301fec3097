"""The best schedule there is, by an exact solver (OR-Tools CP-SAT): for small cases, to compare with.

Micro-batches go through a stage in order. An input is held from the start of its forward to the end of the second half
of its backward, as rows count it.
"""

from ortools.sat.python import cp_model


class Exact:
    """Variables of a step.

    Args:
        placement: stage -> rank.
        count: micro-batches.
        seconds: [kind][stage] of forwards, first halves, second halves; whole numbers.
        over_s: of a message between ranks, a whole number.
        most_s: seconds of a step that is known, which none needs to exceed.
        room: for each rank, in stage inputs.
    """

    def __init__(self, placement, count, seconds, room, over_s=0, most_s=None):
        self.model, self.placement, self.count, self.seconds = cp_model.CpModel(), placement, count, seconds
        stages = range(placement.num_stages)
        whole = sum(seconds[kind][stage] for kind in range(3) for stage in stages) * count
        horizon = whole + 2 * over_s * placement.num_stages * count if most_s is None else most_s
        self.start = {
            (kind, stage, turn): self.model.new_int_var(0, horizon, "")
            for kind in range(3)
            for stage in stages
            for turn in range(count)
        }
        self.horizon = horizon
        self._order(over_s)
        self._ranks(room)

    def end(self, kind, stage, turn):
        return self.start[kind, stage, turn] + self.seconds[kind][stage]

    def _order(self, over_s):
        add, last = self.model.add, self.placement.num_stages - 1
        for kind, stage, turn in self.start:
            begins = self.start[kind, stage, turn]
            if turn:
                add(begins >= self.end(kind, stage, turn - 1))
            if kind == 2 or (kind == 1 and stage == last):
                add(begins >= self.end(kind - 1, stage, turn))
            source = {0: stage - 1, 1: stage + 1}.get(kind, -1)
            if 0 <= source <= last:
                boundary = min(source, stage)
                add(begins >= self.end(kind, source, turn) + over_s * self.placement.crosses(boundary))

    def _ranks(self, room):
        self.span = self.model.new_int_var(0, self.horizon, "")
        self.makespan = self.model.new_int_var(0, self.horizon, "")
        for rank, most in enumerate(room):
            stages = self.placement.stages_of(rank)
            here = [key for key in self.start if key[1] in stages]
            self.model.add_no_overlap(
                [
                    self.model.new_fixed_size_interval_var(self.start[key], self.seconds[key[0]][key[1]], "")
                    for key in here
                ]
            )
            held = []
            for stage in stages:
                for turn in range(self.count):
                    size = self.model.new_int_var(1, self.horizon, "")
                    begin, end = self.start[0, stage, turn], self.end(2, stage, turn)
                    held.append(self.model.new_interval_var(begin, size, end, ""))
            self.model.add_cumulative(held, [1] * len(held), most)
            first = [self.start[0, stage, 0] for stage in stages]
            begin = self.model.new_int_var(0, self.horizon, "")
            self.model.add_min_equality(begin, first)
            for stage in stages:
                last = self.end(2, stage, self.count - 1)
                self.model.add(self.makespan >= last)
                self.model.add(self.span >= last - begin)

    def solve(self, objective, most_s=20.0):
        """(value, whether it is proven best, starts)."""
        self.model.minimize(objective)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = most_s
        solver.parameters.num_workers = 2
        solver.parameters.random_seed = 1
        status = solver.solve(self.model)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        starts = {key: solver.value(var) for key, var in self.start.items()}
        return round(solver.objective_value), status == cp_model.OPTIMAL, starts
