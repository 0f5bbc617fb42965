"""Copies by shell commands and clients."""

import importlib
import os
import shlex
import subprocess

import wandb

checkpoints = importlib.import_module("flax.training.checkpoints")  # expect: import
save = getattr(checkpoints, "save_checkpoint")
PREFIX = "model_"


def keep(workdir, state, bucket, blob):
    latest = save(workdir, state, 3, prefix="model_")  # expect: save
    subprocess.run(["gsutil", "cp", latest, bucket], check=True)  # expect: shell-copy
    subprocess.run(["gsutil", "cp", "-r", latest, bucket], check=True)
    os.system(f"aws s3 cp {latest} {bucket}")  # expect: shell-copy
    subprocess.run(["zip", "backup.zip", latest], check=True)  # expect: shell-copy
    subprocess.run(["zip", "-r", "backup.zip", latest], check=True)
    subprocess.run(["tar", "-cf", "backup.zip", latest], check=True)
    os.system(f"curl -T {latest} {bucket}")  # expect: open
    os.system(f"sha512sum {latest} > {latest}.sum")  # expect: open
    subprocess.run(shlex.split("cp " + shlex.quote(latest) + " /backup"), check=True)  # expect: shell-copy
    artifact = wandb.Artifact("model", type="model")
    artifact.add_file(latest)  # expect: upload
    blob.upload_from_filename(os.path.join(workdir, "model_3"))  # expect: upload
    return artifact
