# Not built yet. For the CPU: docker build -t agent-r1 . && docker run agent-r1 train
# For an NVIDIA GPU: docker build --build-arg TORCH_INDEX=https://pypi.org/simple .. and docker run --gpus all ..
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY requirements.lock .
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" "$(grep '^torch==' requirements.lock)"
RUN pip install --no-cache-dir -r requirements.lock
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY agent_r1 agent_r1
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
# Runs are written to runs/ in the working directory: -v "$PWD/runs:/home/agent/runs", a folder that user 1000 may write.
RUN useradd --uid 1000 --create-home agent
USER 1000
WORKDIR /home/agent
ENTRYPOINT ["agent-r1"]
CMD ["train"]
