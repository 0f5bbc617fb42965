"""File functions of a package that is not scanned."""
from flax.training import checkpoints
from companytools import filesystem, metrics


def main(workdir, state, bucket):
    path = checkpoints.save_checkpoint(workdir, state, 7)
    filesystem.copy(path, f"{bucket}/model")  # expect: wrapped
    metrics.report(path)
    newest = checkpoints.latest_checkpoint(workdir)
    filesystem.delete(newest)  # expect: wrapped
