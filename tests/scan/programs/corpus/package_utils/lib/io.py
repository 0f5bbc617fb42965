import os
import shutil


def save_copy(src, folder):
    os.makedirs(folder, exist_ok=True)
    target = os.path.join(folder, os.path.basename(src))
    shutil.copy2(src, target)  # expect: copy
    return target
