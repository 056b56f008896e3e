"""A Django view that pays an order once, in one file.

    gunicorn --workers 2 --threads 4 --preload django_site:application

The client is made at import, also before gunicorn forks: each worker connects on its first use.
"""

from __future__ import annotations

import shop
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.urls import path

from aiodlock import sync

locks = sync.Client(shop.URL)


def pay(request: HttpRequest, order_id: int) -> JsonResponse:
    try:
        with locks.lock(f"order:{order_id}", timeout=10) as lease:
            return JsonResponse({"paid_now": shop.pay(order_id, lease.token)})
    except sync.AcquireTimeout:
        return JsonResponse({"error": "this order is being paid"}, status=423)


urlpatterns = [path("orders/<int:order_id>/pay", pay)]

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="for the example only")
application = get_wsgi_application()
