"""Pictures."""

import re
import resource
from collections import Counter

import pytest
from ink import cut_texts, overlaps, texts_of
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from thinned import thinned

from pipeloom.cost.costs import Costs
from pipeloom.errors import UserError
from pipeloom.families import make_schedule
from pipeloom.passes import add_reduce_grad, add_unshard, balance, lower
from pipeloom.plotting.charts import _tradeoff_figure, plot_accuracy
from pipeloom.plotting.figure import save
from pipeloom.plotting.palette import channels, fill_of
from pipeloom.plotting.timelines import (
    _timelines_figure,
    box_fill,
    plot_timeline,
    plot_timelines,
    stage_places,
)
from pipeloom.schedule import parse_schedule
from pipeloom.simulation import simulate
from pipeloom.trace import Trace

BEGINNINGS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def example(num_microbatches=2):
    schedule = lower(make_schedule("breadth-first", pp=2, loops=2, num_microbatches=num_microbatches))
    return simulate(schedule, Costs(1, 2, 0.5))


def boxes(trace, tmp_path):
    file = tmp_path / "count.svg"
    plot_timeline(trace, [file], title="count")
    text = file.read_text(encoding="utf-8")
    drawn = re.findall(r'<g id="PolyCollection_\d+">(.*?)</g>', text, re.DOTALL)
    return sum(max(part.count("<path"), part.count("<use")) for part in drawn)


def test_an_earlier_picture_stays_where_the_new_one_cannot_be_written(tmp_path):
    file = tmp_path / "step.png"
    file.write_bytes(b"good")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    figure = Figure()
    figure.subplots().plot([0, 1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match="cannot write the picture .*step.png: File too large"):
            save(figure, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [b"good"]
    save(figure, file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_all_formats_are_written_in_one_go(tmp_path):
    files = [tmp_path / f"picture.{ending}" for ending in BEGINNINGS]
    plot_timeline(example(), files, title="a title", unit="ms", scale=1e3)
    for file in files:
        content = file.read_bytes()
        assert content.startswith(BEGINNINGS[file.suffix[1:]])
        assert len(content) > 5000
    svg = files[1].read_text(encoding="utf-8")
    assert all(
        f">{text}</text>" in svg
        for text in (
            "a title; bubble 33.3%",
            "rank 0",
            "rank 1",
            "time (ms); number in a box: micro-batch",
            "F0",
            "B1",
            "F: forward",
            "B: backward",
            "stages 0 to 1",
        )
    )


def test_every_compute_action_has_a_box_and_nothing_else_has(tmp_path):
    few, more = example(2), example(3)
    assert len(more.compute()) - len(few.compute()) == 8
    assert boxes(more, tmp_path) - boxes(few, tmp_path) == 8


def test_collectives_that_take_time_have_a_box_each_and_a_word_below(tmp_path):
    schedule = lower(make_schedule("breadth-first", pp=2, loops=2, num_microbatches=2))
    schedule = add_reduce_grad(add_unshard(schedule, 1, 1))
    without, gathered, both = (
        simulate(schedule, Costs(1, 2, 0.5, unshard_s, reduce_s)) for unshard_s, reduce_s in [(0, 0), (1, 0), (1, 1)]
    )
    assert boxes(gathered, tmp_path) - boxes(without, tmp_path) == 2 * 3
    assert -boxes(gathered, tmp_path) + boxes(both, tmp_path) == 2 * 2
    text = (tmp_path / "count.svg").read_text(encoding="utf-8")
    assert ">weight gather<" in text
    assert ">gradient reduction<" in text


def test_what_leaves_and_comes_back_has_a_box_each_and_words_below(tmp_path):
    plain = make_schedule("1f1b", pp=4, num_microbatches=8)
    swapped = balance(plain)
    before, after = (simulate(schedule, Costs(1, 2, evict_s=1)) for schedule in (plain, swapped))
    assert -boxes(before, tmp_path) + boxes(after, tmp_path) == 3 + 3
    text = (tmp_path / "count.svg").read_text(encoding="utf-8")
    assert ">move out, then back<" in text


@pytest.mark.parametrize("name", ["a.bmp", "a", "a.jpg", "png"])
def test_an_unknown_ending_is_refused_before_anything_is_drawn(tmp_path, name):
    good = tmp_path / "good.png"
    with pytest.raises(UserError, match=r"expected a file ending in one of \.png, \.svg, \.pdf") as refused:
        plot_timeline(example(), [good, tmp_path / name], title="")
    assert str(tmp_path / name) in str(refused.value)
    assert not good.exists()


def test_a_folder_that_is_not_there_is_the_users_error(tmp_path):
    with pytest.raises(UserError, match="cannot write the picture .*missing"):
        plot_timeline(example(), [tmp_path / "missing" / "a.png"], title="")


def test_a_trace_without_compute_can_be_drawn(tmp_path):
    file = tmp_path / "empty.png"
    plot_timeline(Trace((), 2), [file], title="nothing")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_split_backwards_and_forward_only_steps_can_be_drawn(tmp_path):
    split = simulate(parse_schedule("0F0 0I0 0W0\n1F0 1I0 1W0"), Costs(1, 2))
    forwards = simulate(parse_schedule("0F0\n1F0"), Costs(1, 2))
    assert boxes(split, tmp_path) - boxes(forwards, tmp_path) == 4


def test_the_legend_names_kinds_and_the_axis_the_numbers(tmp_path):
    sliced = simulate(parse_schedule("0F0 0F0.1 0R0.1 0I0.1 0W0.1 0B0"), Costs(1, 2))
    file = tmp_path / "sliced.svg"
    plot_timeline(sliced, [file], title="sliced")
    text = file.read_text(encoding="utf-8")
    assert "number in a box: micro-batch.slice" in text
    for name in ("F: forward", "B: backward", "I: input gradient", "W: weight gradient", "R: recomputed forward"):
        assert f">{name}<" in text


def test_panels_that_are_compared_have_letters_in_all_boxes_or_in_none(tmp_path):
    file, wide = tmp_path / "both.svg", simulate(parse_schedule("0F0 0B0"), Costs(1, 2))
    narrow = simulate(make_schedule("1f1b", pp=2, num_microbatches=60), Costs(0.1, 0.2))
    plot_timelines({"wide": wide}, [file])
    assert ">F0<" in file.read_text(encoding="utf-8")
    plot_timelines({"wide": wide, "narrow": narrow}, [file])
    assert ">F0<" not in file.read_text(encoding="utf-8")
    assert ">0<" in file.read_text(encoding="utf-8")


def test_a_kind_has_its_plain_hue_in_the_legend_and_tones_an_entry_of_their_own(tmp_path):
    file, tones = tmp_path / "looped.svg", [fill_of("forward", place, 2).fill for place in (0, 1)]
    plot_timeline(
        simulate(make_schedule("breadth-first", pp=2, loops=2, num_microbatches=4), Costs(1, 2)), [file], title=""
    )
    text = file.read_text(encoding="utf-8")
    # Of no box; backwards of all stages have tones, too.
    assert [text.count(fill_of(name).fill) for name in ("forward", "backward")] == [1, 1]
    assert all(tone in text for tone in tones)
    assert ">lighter: later stages<" in text
    plot_timeline(simulate(make_schedule("1f1b", pp=2, num_microbatches=4), Costs(1, 2)), [file], title="")
    assert ">lighter: later stages<" not in file.read_text(encoding="utf-8")


def test_boxes_are_drawn_all_at_once_however_many_there_are(tmp_path, monkeypatch):
    calls = Counter()

    def counted(name, function):
        def call(*arguments, **named):
            calls[name] += 1
            return function(*arguments, **named)

        return call

    for name in ("add_collection", "barh", "add_patch", "annotate"):
        monkeypatch.setattr(Axes, name, counted(name, getattr(Axes, name)))
    schedule = add_reduce_grad(lower(make_schedule("1f1b", pp=4, num_microbatches=500)))
    trace = simulate(schedule, Costs(1, 2, 0.5, 1, 1))
    plot_timeline(trace, [tmp_path / "large.png"], title="large")
    assert len(trace.compute()) == 4000
    assert calls == {"add_collection": 2}  # compute, and a strip of collectives; no number fits a box


def test_a_picture_of_shapes_has_pixels_where_shapes_are_too_many(tmp_path, monkeypatch):
    file = tmp_path / "large.svg"
    plot_timeline(example(), [file], title="shapes")
    assert "<image" not in file.read_text(encoding="utf-8")
    monkeypatch.setattr("pipeloom.plotting.timelines._MOST_SHAPES", 10)
    plot_timeline(example(), [file], title="pixels")
    assert "<image" in file.read_text(encoding="utf-8")


def test_rows_of_very_many_ranks_share_a_height_that_a_picture_has(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr("pipeloom.plotting.timelines.save", lambda figure, _: sizes.append(figure))
    plot_timeline(Trace((), 3000), [tmp_path / "many.png"], title="many")
    (figure,) = sizes
    assert figure.get_size_inches()[1] < 50
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert (names[0], names[1]) == ("rank 0", "rank 38")
    assert len(names) <= 80


def test_a_box_has_the_place_and_the_color_of_its_action(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("pipeloom.plotting.timelines.save", lambda figure, _: figures.append(figure))
    trace = simulate(parse_schedule("0F0 0B0\n1F0 1B0"), Costs(1, 2))
    plot_timeline(trace, [tmp_path / "few.png"], title="few", scale=10)
    (boxes_,) = (part for part in figures[0].axes[0].collections if isinstance(part, PolyCollection))
    found = {
        (*path.vertices[:, 0].round(6)[[0, 2]], round(path.vertices[:, 1].mean())): tuple(color[:3])
        for path, color in zip(boxes_.get_paths(), boxes_.get_facecolors(), strict=True)
    }
    places = stage_places(trace)
    expected = {
        (span.start_s * 10, span.end_s * 10, span.rank): channels(box_fill(span.action, places).fill)
        for span in trace.compute()
    }
    assert found == expected


LONG = "a headline that goes on, " * 12 + "with $\\alpha$ and \x1b[31m"


@pytest.mark.parametrize("loops", [2, 8])
def test_no_text_of_a_timeline_is_cut_or_lies_on_another(loops):
    schedule = lower(make_schedule("breadth-first", pp=2, loops=loops, num_microbatches=4))
    schedule = add_reduce_grad(add_unshard(schedule, 1, 1))
    trace = simulate(schedule, Costs(1, 2, 0.5, 1, 1))
    figure = _timelines_figure({LONG: trace, "below": trace}, "units of cost", 1.0)
    assert cut_texts(figure) == []
    assert overlaps(figure) == []
    assert r"and \x1b[31m" in " ".join(text for text, _ in texts_of(figure))


def crowded(num_curves, num_points, spread):
    """Curves whose points lie closer together the smaller the spread."""
    return {
        f"method {curve}": [
            (1e6 * 1.5**point * (1 + spread * curve), 300 / 3**point * (1 + spread * curve), f"{64 * 4**point:,}")
            for point in range(num_points)
        ]
        for curve in range(num_curves)
    }


@pytest.mark.parametrize("spread", thinned([0.0, 0.003, 0.02, 0.2], 2))
@pytest.mark.parametrize("num_curves", [1, 5])
def test_no_text_of_a_tradeoff_is_cut_or_lies_on_another_or_on_a_point(spread, num_curves):
    curves = crowded(num_curves, 5, spread)
    figure = _tradeoff_figure(curves, curves["method 0"], LONG)
    assert cut_texts(figure) == []
    assert overlaps(figure) == []
    (axes,) = figure.axes
    points = [axes.transData.transform(mark[:2]) for marks in curves.values() for mark in marks]
    labels = [(text, box) for text, box in texts_of(figure) if text.replace(",", "").isdecimal()]
    sizes = {label for marks in curves.values() for _, _, label in marks}
    on_curves = [box for text, box in labels if text in sizes]
    assert len(on_curves) == num_curves * 5
    assert not any(box.contains(*point) for box in on_curves for point in points)


def test_names_in_a_picture_of_accuracy_are_taken_as_they_are(tmp_path):
    plot_accuracy({"$\\bad": [(1.0, 2.0)], "hidden$\x07": [(2.0, 1.0)]}, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert r">$\bad</text>" in text
    assert r">hidden$\x07</text>" in text


def test_a_picture_that_is_drawn_again_does_not_change(tmp_path):
    for ending in BEGINNINGS:
        first, second = (tmp_path / f"{name}.{ending}" for name in ("first", "second"))
        for file in (first, second):
            plot_timeline(example(), [file], title="again")
        assert first.read_bytes() == second.read_bytes()


def test_text_of_a_vector_picture_is_text_in_a_font_that_every_reader_has(tmp_path):
    file = tmp_path / "text.svg"
    plot_timeline(example(), [file], title="text")
    styles = re.findall(r"<text style=\"([^\"]*)\"", file.read_text(encoding="utf-8"))
    assert styles
    assert all("sans-serif" in style for style in styles)


@pytest.mark.parametrize(("num_microbatches", "has_forwards"), [(8, True), (32, False)])
def test_all_boxes_of_a_kind_have_numbers_or_none(num_microbatches: int, has_forwards: bool) -> None:
    schedule = make_schedule("breadth-first", pp=8, loops=1, num_microbatches=num_microbatches)
    figure = _timelines_figure({"": simulate(schedule, Costs(forward_s=1, backward_s=2))}, "s", 1.0)
    labels = Counter(text.get_text().strip("FB") for text in figure.axes[0].texts)
    assert labels == dict.fromkeys(map(str, range(num_microbatches)), 8 * (1 + has_forwards))
    assert ("none in narrow boxes" in figure.axes[0].get_xlabel()) != has_forwards
