"""How far a run is, by what has happened."""

from training.checkpoint.progress import Progress


class Batches:
    """Four batches of 8 samples an epoch."""

    def __init__(self):
        self.batch_sampler = self

    def set_epoch(self, epoch, samples):
        self.samples = samples

    def first(self):
        return self.samples // 8

    def __len__(self):
        return 4


def test_steps_are_counted_anew_in_batches_of_another_size():
    progress = Progress(epoch=2, samples=24, step=99)
    progress.count_steps(Batches())
    assert progress.step == 11


def test_a_best_that_is_lost_is_forgotten():
    progress = Progress(best={"val": {"epoch": 1}, "ema": {"epoch": 2}})
    progress.forget_best(["val"])
    assert progress.best == {"ema": {"epoch": 2}}
    progress.forget_best([])
    assert progress.best == {"ema": {"epoch": 2}}
