"""Prints what the benchmarks measured, in their own unit."""


def pytest_terminal_summary(terminalreporter, config):
    """Actions a second, by schedule and verb."""
    session = getattr(config, "_benchmarksession", None)
    entries = [entry for entry in getattr(session, "benchmarks", []) if "num_actions" in entry.extra_info]
    if not entries:
        return
    terminalreporter.section("million actions a second (median)")
    for entry in entries:
        info = entry.extra_info
        rate = info["num_actions"] / entry.stats.median / 1e6
        line = f"{info['family']:<14} {info['size']:<26} {info['num_actions']:>9,} {info['verb']:<25} {rate:8.2f}"
        terminalreporter.write_line(line)
