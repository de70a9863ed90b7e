"""Formats numbers and texts for people."""

from __future__ import annotations

from collections.abc import Iterable


def in_bytes(number: float) -> str:
    """Return a size as ``596.1 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def typed_bytes(number: int) -> str:
    """Return a size as it is typed, rounded up, so that a limit that is given so admits as many.

    >>> typed_bytes(596_010_000), typed_bytes(999_950), typed_bytes(17)
    ('596.1MB', '1.0MB', '17B')
    """
    power = max((power for power in range(4) if number >= 1000**power), default=0)
    tenths = -(-10 * number // 1000**power)
    return in_bytes(tenths * 1000**power / 10).replace(" ", "")


def in_flops(per_second: float) -> str:
    """Return a speed.

    >>> in_flops(9.89e14), in_flops(6.5e10)
    ('989 TFLOP/s', '65 GFLOP/s')
    """
    power = 4 if per_second >= 0.9995e12 else 3
    return f"{per_second / 1000**power:.3g} {'TG'[4 - power]}FLOP/s"


def in_thousands(number: float) -> str:
    """Return a number to four digits.

    >>> in_thousands(1234567), in_thousands(98.217), in_thousands(0.00123456)
    ('1,235,000', '98.22', '0.001235')
    """
    rounded = float(f"{number:.4g}")
    return f"{rounded:,.0f}" if rounded >= 1000 else f"{rounded:.4g}"


def in_time(seconds: float) -> str:
    """Return a time as ``1.23 s``, ``12.3 ms`` or ``45.6 µs``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * factor >= 0.9995 or unit == "µs":
            break
    return f"{seconds * factor:.3g} {unit}" if abs(seconds) >= 1e-9 else "0 s"


def on_a_clock(seconds: float) -> str:
    """Return a duration as a clock shows it.

    >>> on_a_clock(151), on_a_clock(90061)
    ('0:02:31', '25:01:01')
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def drawn(text: str, columns: int) -> str:
    r"""Return what a terminal is sent to show a line in place of the one in which the cursor is, and stays.

    The line is cut to the terminal's width, of which a terminal may say that it is 0.

    >>> drawn("saving: 3 s", 8)
    '\r\x1b[Ksaving:'
    """
    return f"\r\x1b[K{''.join(letter if letter.isprintable() else '?' for letter in text)[: (columns or 80) - 1]}"


def plain(text: object, longest: int = 300) -> str:
    r"""Return a text as it may stand on a terminal: one line, nothing that a terminal would take as an order.

    >>> plain("mlx5_0\x1b[2J\nup")
    'mlx5_0\\x1b[2J up'
    """
    words = " ".join(str(text).split())
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    return safe if len(safe) <= longest else f"{safe[: longest - 3]}..."


def describe_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words.

    >>> describe_ranks([3]), describe_ranks([0, 5, 1, 2])
    ('rank 3', 'ranks 0-2, 5')
    """
    numbers = sorted(ranks)
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"
