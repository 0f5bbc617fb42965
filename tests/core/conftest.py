"""The stores of `tests/stores`, for what every storage must do."""

from tests.stores.conftest import az_bucket as az_bucket
from tests.stores.conftest import az_server as az_server
from tests.stores.conftest import bucket as bucket
from tests.stores.conftest import gs_bucket as gs_bucket
from tests.stores.conftest import gs_server as gs_server
from tests.stores.conftest import s3_server as s3_server
from tests.stores.conftest import shelf as shelf
