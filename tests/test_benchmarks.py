"""The results name benchmarks, and options of them, that there are; and they open with one table."""

import re
import shlex
from datetime import date
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "benchmarks"
RESULTS = (FOLDER / "RESULTS.md").read_text()
COMMANDS = sorted(set(re.findall(r"`[^`\n]*?python benchmarks/(\w+)\.py([^`\n]*)`", RESULTS)))

SHARED = {"add_busy(": "quiet.py", "add_models(": "step.py"}  # where options stand that several benchmarks take


def test_the_commands_name_files_and_options_that_there_are():
    assert len({name for name, _ in COMMANDS}) > 10
    unknown = []
    for name, words in COMMANDS:
        source = (FOLDER / f"{name}.py").read_text()
        source += "".join((FOLDER / other).read_text() for call, other in SHARED.items() if call in source)
        options = [word for word in shlex.split(words) if word.startswith("--")]
        unknown += [f"{name}.py {option}" for option in options if f'"{option}"' not in source]
    assert not unknown


def test_the_results_open_with_one_table_of_what_was_measured_beside_whom_and_how():
    lines = RESULTS.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first : lines.index("", first)]]
    assert table[0] == ["what", "configuration", "ours", "rival", "ratio", "machine", "date", "command"]
    assert len(table) > 40
    for row in table[2:]:
        *what, ratio, machine, day, command = row
        assert [bool(cell) for cell in what] == [True] * 4, row
        assert re.match(r"\d+\.\d\d", ratio) or (ratio == what[-1] == "–"), f"a ratio has a rival: {row}"
        assert re.match(r"[ABC]\b|–$", machine), row
        assert date.fromisoformat(day), row
        assert re.fullmatch(r"`.*python benchmarks/\w+\.py.*`", command), row
