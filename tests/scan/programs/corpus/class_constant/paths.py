class Paths:
    ROOT = None
    NAME = "policy_"

    @classmethod
    def of(cls, step):
        return f"{cls.ROOT}/{cls.NAME}{step}"
