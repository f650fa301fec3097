"""The playground in a browser without a window: its pictures for the docs, or how long it takes from a slider's move.

Run by ``make playground-pictures`` and ``make playground-speed``; needs Chromium on PATH.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from chromium import BROWSER, MISSING, chromium

PICTURES = Path(__file__).parent.parent / "docs/images"
WIDTH, COLORS = 1280, 192
"""Pixels of a picture, and its number of colors, which take half the bytes of all."""
WRONG = "0F0+0F1+0B0+0B1%0A1F0+1B1+1F1+1B0"
LINKS = {
    "playground": ("family=breadth-first&loops=4", 900, "light"),
    "playground-dark": ("family=zb-v&num_microbatches=12&transfer=0.25", 900, "dark"),
    "playground-compare": ("family=1f1b&num_microbatches=16&b.family=zb-h1&b.num_microbatches=16", 900, "light"),
    "playground-rule": (f"text={WRONG}", 480, "light"),
}
"""For each picture what is behind the address, the height and the mode."""
IDLE = "sides.every((side) => !side.isBusy)"
LARGE = "family=breadth-first&pp=8&loops=4&num_microbatches=64"
WARM, MOVES = 20, 40
MOVE = """(async () => {
  const [slider, side] = [document.getElementById("A-forward-slider"), sides[0]];
  const shown = new Promise((done) => {
    side.show = (...all) => {
      delete side.show;
      side.show(...all);
      done();
    };
  });
  slider.value = %s;
  const begin = performance.now();
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  await shown;
  const drawn = performance.now() - begin;
  // A message that is sent in a frame's callback arrives when the frame has been painted.
  await new Promise(requestAnimationFrame);
  const channel = new MessageChannel();
  await new Promise((done) => { channel.port1.onmessage = done; channel.port2.postMessage(0); });
  return { painted: performance.now() - begin, drawn, computed: side.answer.computed_ms };
})()"""
"""Milliseconds of a move of the slider."""


@contextmanager
def open_page() -> Iterator[tuple[Any, str]]:
    """A page in a browser, and the address of a playground of its own."""
    if BROWSER is None:
        sys.exit(MISSING)
    command = [sys.executable, "-m", "pipeloom", "playground", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stdout or () if "http://" in line)
            with chromium() as page:
                yield page, line.split()[-1]
        finally:
            server.terminate()


def draw_pictures() -> None:
    """Write every picture and its size."""
    with open_page() as (page, url):
        for name, (link, height, mode) in LINKS.items():
            page.look(width=WIDTH, height=height, mode=mode)
            page.call("Emulation.setScrollbarsHidden", hidden=True)
            page.open(f"{url}#{link}")
            page.wait(IDLE)
            # What differs from run to run.
            page.run("document.querySelectorAll('.timing').forEach((one) => one.remove())")
            few = Image.open(BytesIO(page.picture())).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
            file = PICTURES / f"{name}.png"
            few.save(file, optimize=True)
            print(f"{file.relative_to(Path.cwd())}: {file.stat().st_size:,} bytes")


def measure() -> None:
    """Print milliseconds from the input event to the drawn timeline, and to the painted frame."""
    with open_page() as (page, url):
        page.look(width=1400, height=900)
        page.open(f"{url}#{LARGE}")
        page.wait(IDLE)
        moves = []
        for number in range(WARM + MOVES):
            moves.append(page.run(MOVE % (0.5 + number % 10 / 10)))
            time.sleep(0.15)
    moves = moves[WARM:]
    for name in moves[0]:
        times = sorted(move[name] for move in moves)
        print(f"{name:<9} median {median(times):5.1f} ms, fastest {times[0]:5.1f} ms, of {len(times)} moves")
    print(f"load of the machine in the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    {"pictures": draw_pictures, "speed": measure}[sys.argv[1]]()
