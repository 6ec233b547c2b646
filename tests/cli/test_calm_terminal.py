"""What stands on a real terminal of 80 columns while `rolecall rl` runs."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios

REWARD = "def letters(completions, **kwargs):\n    return [float(sum(c.encode()) % 7) for c in completions]\n"


def on_a_terminal(words, cwd):
    """(exit code, all that was written)."""
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover
        os.chdir(cwd)
        os.environ.update(TERM="xterm", OMP_NUM_THREADS="1", COLUMNS="80", LINES="24")
        os.execv(sys.executable, [sys.executable, "-m", "rolecall", *words])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    written = b""
    while True:
        try:
            more = os.read(terminal, 65536)
        except OSError:  # the other side is gone
            break
        if not more:
            break
        written += more
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode()


def test_one_line_per_step_and_nothing_twice(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    words = ["rl", "--preset", "ppo", "--rows", "sorting:length=2", "--reward", "mine.py:letters", "--steps", "4"]
    words += ["--prompts", "8", "--samples", "4", "--sampling.max_new_tokens", "6", "--algorithm.kl_coef", "0.05"]
    words += ["--eval.every", "2", "--eval.rows", "8", "--out", "run"]
    code, written = on_a_terminal(words, tmp_path)
    assert code == 0, written[-2000:]
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written))
    assert max(map(len, lines)) <= 80
    assert "/?" not in written
    steps = [line for line in lines if re.match(r"step \d", line)]
    shape = r"step \d: reward \d\.\d{3}, length \d\.\d, KL -?\d\.\d{4}, [\d.e-]+ s/step(, \d+ s left)?"
    assert steps
    assert all(re.fullmatch(shape, line.strip()) for line in steps), steps
    assert len({line.split(":")[0] for line in steps}) == len(steps), "a line per step"
    assert steps[-1].startswith("step 4: ")
    said = [line.strip() for line in lines if line.strip() and not re.match(r"[\u2800-\u28ff ]|step|update|sync", line)]
    assert len([line for line in said if line.startswith("the loss is ")]) in (1, 2)
    evaluations = [line for line in said if "evaluation" in line]
    assert [line.split(":")[0] for line in evaluations] == [f"evaluation at step {i}" for i in (0, 2, 4)]
    rest = [line for line in said if line not in evaluations and not line.startswith("clipped_ratio")]
    assert len(set(rest)) == len(rest), "nothing is said twice"
    assert not any("in sync" in line or "weights moved" in line for line in said)
    assert re.search(r"update .* \d+/\d+ (micro-batches|optimiser steps)", written)
