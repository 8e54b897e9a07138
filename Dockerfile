# shotclock as the first process of a container: `docker run --rm -v "$PWD:/work" shotclock exec --timeout 5m -- make test`.
# It reaps orphans and passes signals on, so no other init is needed.
FROM python:3.13-slim AS build
COPY . /source
RUN pip install --no-cache-dir --prefix=/installed /source

FROM python:3.13-slim
COPY --from=build /installed /usr/local
WORKDIR /work
ENTRYPOINT ["shotclock"]
CMD ["--help"]
