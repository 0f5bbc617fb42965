import shutil


def backup(src, dst):
    shutil.copytree(src, dst, dirs_exist_ok=True)


def drop(path):
    shutil.rmtree(path, ignore_errors=True)
