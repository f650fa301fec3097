"""One page on this machine that draws a schedule while it changes: ``pipeloom playground``.

``answers`` turns what the page sends into the same schedule, figures and refusals as ``pipeloom schedule``;
``server`` passes them on, to one browser on this machine; the page lays them out.
"""
