HOOKS = {"after_save": []}


def register(event, function):
    HOOKS[event].append(function)


def fire(event, *arguments):
    for function in HOOKS[event]:
        function(*arguments)
