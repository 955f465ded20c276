"""Why code and spec agree, for all inputs."""
