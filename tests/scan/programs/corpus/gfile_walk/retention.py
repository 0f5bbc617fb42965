import re

import tensorflow as tf

_NAME = r"checkpoint_(\d+)"


def list_checkpoints(model_dir):
    result = {}
    for folder, _, filenames in tf.io.gfile.walk(model_dir):  # expect: file-names
        for filename in filenames:
            m = re.fullmatch(_NAME, filename)  # expect: parse-name
            if m is not None:
                result[int(m.group(1))] = tf.io.gfile.join(folder, filename)
    return result


def keep_last(model_dir, n):
    found = list_checkpoints(model_dir)
    for step in sorted(found)[:-n]:
        tf.io.gfile.remove(found[step])  # expect: remove
    return len(found)
