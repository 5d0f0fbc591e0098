"""gcp-storage-emulator with the condition that it lacks: ifGenerationMatch=0, by which an object is created only if it is absent.

python tests/gcs_server.py start --host=127.0.0.1 --port=9023 --in-memory --default-bucket=b
"""

from gcp_storage_emulator import __main__, server, storage


class PreconditionError(Exception):
    """The object is there."""


def main():
    handled, create, begin = server.RequestHandler, storage.Storage.create_file, storage.Storage.create_resumable_upload
    is_conditional = False

    def checked(self, bucket, name):
        if is_conditional and name in self.objects.get(bucket, {}):
            raise PreconditionError

    def created(self, bucket, name, *given):
        checked(self, bucket, name)
        create(self, bucket, name, *given)

    def begun(self, bucket, name, *given):
        checked(self, bucket, name)
        return begin(self, bucket, name, *given)

    def conditional(handle):
        def answered(self):
            nonlocal is_conditional
            is_conditional = "ifGenerationMatch=0" in self.path  # one request at a time
            try:
                handle(self)
            except PreconditionError:
                self.send_response(412)
                self.send_header("Content-Length", "0")
                self.end_headers()

        return answered

    storage.Storage.create_file, storage.Storage.create_resumable_upload = created, begun
    handled.do_POST, handled.do_PUT = conditional(handled.do_POST), conditional(handled.do_PUT)
    __main__.main()


if __name__ == "__main__":
    main()
