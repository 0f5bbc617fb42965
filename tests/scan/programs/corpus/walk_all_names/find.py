import os


def find_all(root, wanted):
    """Every path below a folder whose name is wanted."""
    return sorted(
        os.path.join(folder, name) for folder, folders, files in os.walk(root) for name in files if wanted(name)  # expect: file-names
    )
