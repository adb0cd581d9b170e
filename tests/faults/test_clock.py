"""The machine's clock is set while a run goes on: nothing in it goes by that clock, but what it
writes as the time.
"""

import os
import re
import shutil
import subprocess

import pytest
from support.fault_runs import RUN, assert_ends_like, finish
from support.programs import assert_none_left, start, wait_for, wait_for_first_step

# Stands before the C library: the time of day is as many seconds off as a file says.
SHIFTED = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    char text[32] = {0};
    int file = open(getenv("SHIFT"), O_RDONLY);
    if (file < 0) return 0;
    if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
    close(file);
    return atol(text);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = next(clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += shift();
    return failed;
}
time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *result, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    result->tv_sec = now.tv_sec;
    result->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""
HOUR = 3600
YEAR = 365 * 86400


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    """The environment of programs whose clock is off by what its file SHIFT says."""
    if not shutil.which("gcc"):
        pytest.skip("a clock that is set needs gcc")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "shifted.c").write_text(SHIFTED)
    words = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        folder / "shifted.so",
        folder / "shifted.c",
        "-ldl",
    ]
    subprocess.run(words, check=True)
    return {"LD_PRELOAD": str(folder / "shifted.so"), "SHIFT": str(folder / "shift")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was left alone."""
    return finish(tmp_path_factory.mktemp("whole"))[0]


def set_clock(clock, seconds):
    with open(clock["SHIFT"] + "_", "w") as file:
        file.write(str(seconds))
    os.replace(clock["SHIFT"] + "_", clock["SHIFT"])


@pytest.mark.slow
@pytest.mark.parametrize("jumps", [[-HOUR, YEAR], [YEAR, -HOUR], [-70 * YEAR], [20 * YEAR]])
def test_a_clock_that_is_set_in_mid_run_changes_no_bit(tmp_path, whole, clock, jumps):
    set_clock(clock, 0)
    process = start(tmp_path, *RUN, "SAVE_MINUTES", "60", "DIST.TIMEOUT", "120", **clock)
    run = tmp_path / "run"
    pids = wait_for_first_step(process, tmp_path / "run")
    for count, seconds in enumerate(jumps, 1):
        line = f"epoch {count}/3 step {22 * count}:"
        assert wait_for(lambda line=line: line in (run / "log.txt").read_text(), process)
        set_clock(clock, seconds)
    _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (0, "")
    assert_none_left(pids)
    times = re.findall(r"^(\d{4} \d\d):\d\d:\d\d ", (run / "log.txt").read_text(), re.M)
    assert len(set(times)) > len(jumps) or max(map(abs, jumps)) % YEAR == 0  # it was seen
    assert_ends_like(whole, tmp_path)
