"""Whose request it is: the tenant that is charged for it, and whose prefixes it may share.

with API keys      the tenant of the key in `Authorization: Bearer KEY`; whatever else the client says does not count
without (at home)  the header X-Quire-Tenant, else the field `user`, else the tenant without a name
"""

from collections.abc import Mapping

from gateway.api_keys import ApiKeys
from gateway.errors import InvalidKeyError, InvalidRequestError
from gateway.settings import GatewaySettings

TENANT_HEADER = "X-Quire-Tenant"
MAX_TENANT_CHARS = 256


class Tenants:
    """Tells the tenant of a request by its headers; `keys` None: everybody may be whoever they say."""

    def __init__(self, keys: ApiKeys | None) -> None:
        self._keys = keys

    @classmethod
    def from_settings(cls, settings: GatewaySettings) -> "Tenants":
        """Read the keys that the settings name. Raises FileMistakeError."""
        if not (settings.api_keys or settings.api_keys_file):
            return cls(None)
        return cls(ApiKeys(settings.api_keys, settings.api_keys_file))

    def of(self, headers: Mapping[str, str], user: str) -> str:
        """Return a request's tenant. Raises InvalidKeyError, and InvalidRequestError for a name that is too long."""
        if self._keys is not None:
            return self._of_key(self._keys, headers.get("Authorization", ""))
        tenant = headers.get(TENANT_HEADER) or user
        if len(tenant) > MAX_TENANT_CHARS:
            raise InvalidRequestError(
                f"{TENANT_HEADER}: {len(tenant)} characters are more than the {MAX_TENANT_CHARS} of a tenant's name."
            )
        return tenant

    def _of_key(self, keys: ApiKeys, authorization: str) -> str:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidKeyError("You didn't provide an API key: send it in the header `Authorization: Bearer KEY`.")
        tenant = keys.tenant_of(key.strip())
        if tenant is None:
            raise InvalidKeyError("Incorrect API key provided.")
        return tenant
